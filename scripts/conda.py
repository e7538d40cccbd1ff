#!/usr/bin/env python3
"""What scripts/conda.sh asks of rattler-build and rattler, which have no commands on PyPI.

  conda.py build RECIPE CHANNELS PLACE [VARIANTS]   builds a recipe's packages, runs their tests, and puts them into the channel PLACE
  conda.py install CHANNELS PREFIX PACKAGE...       installs packages and what they depend on

CHANNELS: names, URLs or folders with commas between them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import rattler
import rattler_build
from rattler_build.progress import LogEvent, SimpleProgressCallback


def channels(named: str) -> list[str]:
    return [Path(name).absolute().as_uri() if Path(name).is_dir() else name for name in named.split(",") if name]


class Log(SimpleProgressCallback):
    def on_log(self, event: LogEvent) -> None:
        print(event.message, flush=True)


def build(recipe: str, named: str, place: str, variants: str = "") -> None:
    found = rattler_build.VariantConfig.from_file(variants) if variants else None
    tool = rattler_build.ToolConfiguration(test_strategy="native")
    parsed = rattler_build.Stage0Recipe.from_file(recipe)
    parsed.run_build(variant_config=found, tool_config=tool, output_dir=place, channels=channels(named), progress_callback=Log())


def install(named: str, prefix: str, *packages: str) -> None:
    async def do() -> None:
        records = await rattler.solve(channels(named), packages, virtual_packages=rattler.VirtualPackage.detect())
        await rattler.install(records, prefix, show_progress=False)

    asyncio.run(do())


{"build": build, "install": install}[sys.argv[1]](*sys.argv[2:])
