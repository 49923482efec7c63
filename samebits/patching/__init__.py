"""Pinned upstreams and the patch series on them. Needs git; imports no torch.

tree_path(upstream, model)   verified patched tree, or Refused with the command that builds it
tree_record(upstream, model) what that tree was built from
python_paths(model)          the trees of all patched upstreams, for PYTHONPATH
"""

from samebits.patching.trees import python_paths, tree_path, tree_record

__all__ = ["python_paths", "tree_path", "tree_record"]
