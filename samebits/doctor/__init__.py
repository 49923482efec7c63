"""Find, in seconds and before a job, what would move bits or stop the job.

    findings = examine()                          # this machine and its environment
    findings += check_settings(read_settings(p))  # a config with sampling settings

No engine is started and torch is not imported.
"""

from samebits.doctor.finding import Finding, exit_code
from samebits.doctor.machine import examine
from samebits.doctor.settings import check_names, check_settings, read_settings

__all__ = ["Finding", "check_names", "check_settings", "examine", "exit_code", "read_settings"]
