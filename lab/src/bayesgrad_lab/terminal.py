"""What a terminal shows: trials as they go, and the tables of a report."""

from __future__ import annotations

import math
from typing import Any


class Display:
    """Live progress in a terminal: a bar, loss, error and steps per second; a line for each trial elsewhere."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = console
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task, self.steps, self.key = self.bars.add_task("starting", total=1, state=""), 1, ""

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def expect(self, trial: Any, epochs: int, steps: int) -> None:
        self.steps, self.key = steps, trial.key
        self.bars.reset(self.task, description=trial.key, total=epochs * steps, state="")
        if not self.console.is_terminal:
            self.say(f"{trial.key}: {epochs} epochs of {steps} steps" if steps > 1 else f"{trial.key}: {epochs} runs")

    def progress(self, trial: Any, epoch: int, step: int, loss: float, error: float, rate: float) -> None:
        words = [f"loss {loss:.4f}"] if math.isfinite(loss) else []
        words += [f"error {100 * error:.1f} %"] if math.isfinite(error) else []
        words += [f"{rate:.0f} steps/s"] if math.isfinite(rate) else []
        self.bars.update(self.task, completed=epoch * self.steps + step, state=", ".join(words))


def show(console: Any, report: Any) -> None:
    from rich.table import Column, Table

    console.print(f"\n{report.title}", style="bold", markup=False, highlight=False)
    for story in report.stories:
        console.print(f"\n{story['headline']}", style="bold", markup=False, highlight=False)
    for table in [*(story["table"] for story in report.stories), *report.tables]:
        shown = Table(
            *(Column(name, overflow="fold") for name in table["columns"]),  # no digit may be cut off
            title=table["title"],
            title_justify="left",
            header_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
        )
        for row in table["rows"]:
            shown.add_row(*(str(cell).replace(" ± ", "±") for cell in row))  # 80 columns are few
        console.print(shown)
    if report.verdict:
        console.print(f"Verdict. {report.verdict}", highlight=False, markup=False)
