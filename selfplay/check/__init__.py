"""Checking an environment harder than a user would: by playing it, in a process of its own.

checked(env_id, params) ──► child process: every check in turn, one JSON line each ──► Report
"""

from selfplay.check.report import Check, Finding, Report
from selfplay.check.runner import check_here
from selfplay.check.supervise import check_environment

__all__ = ["Check", "Finding", "Report", "check_environment", "check_here"]
