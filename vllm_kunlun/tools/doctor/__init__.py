"""Checks an installation: facts are collected once, each check turns them into findings, each finding has its fix."""

from __future__ import annotations

from vllm_kunlun.tools.doctor.checks import examine
from vllm_kunlun.tools.doctor.facts import Facts, collect
from vllm_kunlun.tools.doctor.finding import Finding, Status
from vllm_kunlun.tools.doctor.report import write_report

__all__ = ["Facts", "Finding", "Status", "collect", "examine", "write_report"]
