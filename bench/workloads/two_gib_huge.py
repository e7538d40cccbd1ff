"""The same 2 GiB in huge pages."""

from dataclasses import replace

from .two_gib import WORKLOAD as SMALL_PAGES

WORKLOAD = replace(SMALL_PAGES, name="two_gib_huge", title="2 GiB in 64 tensors, huge pages", huge=True)
