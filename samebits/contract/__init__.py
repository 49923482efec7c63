"""The contract: which implementation computes which region, loaded (never derived) by both engines.

contract = Contract.load(path)          # strict: canonical bytes, closed schema, true digests
contract.plan("gemm.row")               # ReductionPlan
contract.constants("attention")         # {"partition": 64, ...}
contract.check_model(hf_config)         # refuses the contract of another model
binding = contract.bind("rollout")      # content hashes and known-answer probes of this process
contract.check_served(counts, cases)    # a bound region that never ran is a violation
"""

from samebits.contract.model import Contract
from samebits.contract.platform import Binding

__all__ = ["Binding", "Contract"]
