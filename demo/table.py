"""The demo's closing table."""

from __future__ import annotations

from typing import Any

from .job import Job


def verdicts(reference: Job, job: Job) -> dict[str, bool]:
    """Returns whether a killed job has the same losses and weights as the uninterrupted one, bit for bit."""
    losses = {step: event["loss"] for step, event in job.steps.items()}
    # A kill within a save leaves no record of that step. None is needed if the save was complete.
    expected = {step: event["loss"] for step, event in reference.steps.items() if step in losses}
    complete = len(expected) >= len(reference.steps) - 1
    return {"losses": complete and losses == expected, "weights": job.digest == reference.digest}


def lines(figures: dict[str, Any]) -> list[str]:
    """Returns the lines of the table."""
    ours, theirs = figures["nebula"], figures["torch"]

    def row(title: str, form: str, key: str) -> tuple[str, str, str]:
        return title, form.format(ours[key]), form.format(theirs[key])

    def equal(run: dict[str, Any]) -> str:
        return "yes" if run["equal"]["losses"] and run["equal"]["weights"] else "NO"

    rows = [
        ("", "Nebula", "torch.save + fsync"),
        row("training blocked per save, median", "{:.1f} ms", "blocked_ms_median"),
        row("training blocked per save, worst", "{:.1f} ms", "blocked_ms_max"),
        row("a step is slower by", "{:.1%}", "inflation"),
        row("steps lost at the kill", "{}", "steps_lost"),
        row("found again in", "{}", "source"),
        row("time to load it", "{:.0f} ms", "load_ms"),
        row("from kill to training again", "{:.1f} s", "kill_to_training_s"),
        ("losses and weights equal, bit for bit", equal(ours), equal(theirs)),
    ]
    widths = [max(len(cells[column]) for cells in rows) for column in range(3)]
    text = [f"  {a:<{widths[0]}}   {b:>{widths[1]}}   {c:>{widths[2]}}" for a, b, c in rows]
    text.insert(1, "  " + "─" * (sum(widths) + 6))
    return text
