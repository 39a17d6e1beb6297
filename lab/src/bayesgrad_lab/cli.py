"""The command line: demo, list, run, compare, race, report, bench."""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. What a user can mend is said in one sentence, with exit code 2."""
    arguments = _parser().parse_args(argv)
    command = ["bayesgrad", *(sys.argv[1:] if argv is None else argv)]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± must not cost the result
    try:
        return arguments.call(arguments, shlex.join(command)) or 0
    except ModuleNotFoundError as error:
        package = {"sklearn": "scikit-learn"}.get(error.name or "", error.name)
        print(f"bayesgrad: {package} is missing: pip install {package}.", file=sys.stderr)
    except (ValueError, OSError) as error:
        if os.environ.get("BAYESGRAD_TRACEBACK"):
            raise
        print(f"bayesgrad: {_words(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        again = "; the same command with --resume continues from here" if "resume" in arguments else ""
        print(f"\nbayesgrad: interrupted{again}.", file=sys.stderr)
        return 130
    return 2


def _words(error: Exception) -> str:
    """An operating-system error as a sentence; our own are sentences already."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a file'} cannot be used: {(error.strerror or str(error)).lower()}."
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bayesgrad", description="Compare optimizers on your data, and run the experiments of five papers."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    demo = commands.add_parser("demo", help="four things that the library is for, on one page, in about two minutes")
    demo.add_argument("--scale", choices=("smoke", "laptop"), default="laptop", help="smoke: seconds, no verdict")
    _common(demo, data=False)
    demo.set_defaults(call=_demo, seeds=5, data_dir=None, download=False, device="cpu", storage="")

    listing = commands.add_parser("list", help="the experiments, and whether each claim held")
    listing.set_defaults(call=_list)

    run = commands.add_parser("run", help="run an experiment of a paper", choices=_experiment_names)
    run.add_argument("name", help="as shown by 'bayesgrad list'")
    run.add_argument(
        "--scale",
        choices=("smoke", "laptop", "paper"),
        default="laptop",
        help="smoke: seconds to minutes, no data files, no verdict; laptop: about an hour on two cores; paper: the "
        "size of the paper (default: laptop)",
    )
    _common(run)
    run.set_defaults(call=_run)

    compare = commands.add_parser("compare", help="compare optimizers on a data set", choices=_compare_names)
    compare.add_argument(
        "--data", default="digits", help="a data set's name, or FILE.npz, or FILE.csv (default: digits)"
    )
    compare.add_argument("--model", help="a network (default: one that fits the data)")
    compare.add_argument(
        "--optimizers", default="sgd,adamw,adabound,adabayes,adabayesfp", help="names, separated by commas"
    )
    compare.add_argument("--epochs", type=_positive, default=15)
    compare.add_argument("--batch-size", type=_positive, default=64)
    compare.add_argument("--examples", type=_positive, help="train on at most this many examples")
    compare.add_argument(
        "--lr-search",
        action="store_true",
        help="try five learning rates for each optimizer, a third of the epochs each; keep the best on held-out data",
    )
    compare.add_argument(
        "--prune",
        choices=("asha", "hyperband"),
        default="",
        help="give up learning rates that lag behind; which ones depends on the order in which trials end",
    )
    _common(compare)
    compare.set_defaults(call=_compare)

    race = commands.add_parser("race", help="time to a validation target, beside other optimizers", choices=_race_names)
    race.add_argument(
        "phase",
        choices=("plan", "targets", "run"),
        help="plan: how long it takes at most; targets: AdamW's, before any other run; run: all optimizers",
    )
    race.add_argument("--scale", choices=("smoke", "laptop"), default="laptop", help="smoke: seconds, drawn data")
    race.add_argument("--workloads", default="", help="names, separated by commas (default: all)")
    race.add_argument("--optimizers", default="", help="names, separated by commas (default: all)")
    race.add_argument("--record", type=Path, help="a file of results to add to; the page shows all that it has")
    _common(race)
    race.set_defaults(call=_race, seeds=5)

    report = commands.add_parser("report", help="one page of finished runs")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="default: report.html")
    report.add_argument("--markdown", type=Path, help="also write Markdown and its pictures into this folder")
    report.set_defaults(call=_report)

    bench = commands.add_parser("bench", help="time elementwise and layer-wise optimizers beside torch.optim")
    bench.add_argument("--history", type=Path, help="a file of earlier measurements, to which this one is added")
    bench.add_argument("--write", type=Path, help="a Markdown file to write the table to")
    bench.add_argument("--rounds", type=int, default=200, help="steps of each optimizer (%(default)s)")
    bench.add_argument("--warm", type=int, default=420, help="steps before, of layer-wise ones (%(default)s)")
    bench.add_argument("--seconds", type=float, default=6.0, help="of steps before, of elementwise ones (%(default)s)")
    bench.set_defaults(call=_bench)
    return parser


def _common(parser: argparse.ArgumentParser, data: bool = True) -> None:
    parser.add_argument("--seeds", type=_positive, default=3, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="a folder for runs (default: runs)")
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted run, or work on one that another process runs"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but where the report is, and errors")
    if not data:
        return
    parser.add_argument("--data-dir", help="where data files are (default: $BAYESGRAD_DATA)")
    parser.add_argument("--download", action="store_true", help="fetch missing data files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--storage",
        default="",
        metavar="URL",
        help="of the trials, for Optuna: journal:PATH or a database's (default: a journal in the run's folder)",
    )


class _Version(argparse.Action):
    """Versions are looked up only if they are asked for, because importing torch takes seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from bayesgrad_lab.store import versions

        print(", ".join(f"{name} {version}" for name, version in versions().items() if name != "machine"))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser whose help lists the names that arguments may take; they are imported only then."""

    def __init__(self, *args: Any, choices: Callable[[], dict[str, Iterable[str]]] | None = None, **kwargs: Any):
        super().__init__(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.choices = choices

    def format_help(self) -> str:
        if self.choices:
            lines = (f"{title}: {', '.join(names)}" for title, names in self.choices().items())
            self.epilog = "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)
        return super().format_help()


def _experiment_names() -> dict[str, Iterable[str]]:
    from bayesgrad_lab.experiments import EXPERIMENTS

    return {"experiments": EXPERIMENTS}


def _compare_names() -> dict[str, Iterable[str]]:
    from bayesgrad_lab import datasets, methods, networks

    return {"data sets": datasets.NAMES, "models": networks.NETWORKS, "optimizers": methods.METHODS}


def _race_names() -> dict[str, Iterable[str]]:
    from bayesgrad_lab import race_entrants, race_workloads

    return {"workloads": race_workloads.WORKLOADS, "optimizers": race_entrants.ENTRANTS}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return int(text)


def _check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {name} is not available on this machine: use cpu.") from None


def _check_optimizer(name: str, model: Any, network: str) -> None:
    """Refuses an optimizer that cannot train a network; what it warns of is said when it does."""
    import warnings

    from bayesgrad_lab.methods import Setup, method

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method(name).of(model, Setup(method(name).lr))
        except ValueError as error:
            raise ValueError(f"{name} cannot train {network}: {error}") from None


# --- commands ---


def _list(arguments: argparse.Namespace, command: str) -> None:
    """Experiments under their papers, each with its status on the line of its name; a reason has lines of its own."""
    from rich.console import Console

    from bayesgrad_lab.experiments import EXPERIMENTS

    console, width = Console(highlight=False, markup=False, soft_wrap=True), max(map(len, EXPERIMENTS))
    for paper in dict.fromkeys(e.paper for e in EXPERIMENTS.values()):
        console.print(paper, style="bold")
        for e in EXPERIMENTS.values():
            if e.paper == paper:
                status, colon, reason = e.outcome.partition(": ") if e.unresolved else (e.outcome, "", "")
                console.print(f"{e.name:{width}}  {status}{colon.strip()}")
                indent = "    "
                if reason:
                    console.print(textwrap.fill(reason, console.width, initial_indent=indent, subsequent_indent=indent))
                console.print("    " + ". ".join(filter(None, (e.figure, e.about))), style="dim")
        console.print()


def _run(arguments: argparse.Namespace, command: str) -> None:
    from bayesgrad_lab.experiments import EXPERIMENTS
    from bayesgrad_lab.names import unknown

    if arguments.name not in EXPERIMENTS:
        raise unknown("experiment", arguments.name, EXPERIMENTS)
    settings = {"experiment": arguments.name, "scale": arguments.scale}
    folder = arguments.out / f"{arguments.name}-{arguments.scale}"
    _carry_out(arguments, folder, settings, command, EXPERIMENTS[arguments.name].report)


def _demo(arguments: argparse.Namespace, command: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # of the processes that the pool starts
    import torch

    from bayesgrad_lab import demo

    torch.set_num_threads(1)
    settings = {"demo": demo.VERSION, "scale": arguments.scale}
    folder = arguments.out / f"demo{'-smoke' * (arguments.scale == 'smoke')}"
    _carry_out(arguments, folder, settings, command, demo.run)


def _compare(arguments: argparse.Namespace, command: str) -> None:
    from bayesgrad_lab import datasets, figures, networks
    from bayesgrad_lab.compare import SCORES, Budget, compare, curves, table
    from bayesgrad_lab.context import Context
    from bayesgrad_lab.methods import METHODS
    from bayesgrad_lab.names import unknown
    from bayesgrad_lab.report import Report
    from bayesgrad_lab.task import Task

    names = list(dict.fromkeys(name.strip() for name in arguments.optimizers.split(",") if name.strip()))
    for name in names:
        if name not in METHODS:
            raise unknown("optimizer", name, METHODS)
    if not names:
        raise ValueError(f"--optimizers names none; there are: {', '.join(METHODS)}.")
    if arguments.model and arguments.model not in networks.NETWORKS:
        raise unknown("model", arguments.model, networks.NETWORKS)
    if not arguments.data.endswith((".npz", ".csv")) and arguments.data not in datasets.NAMES:
        raise unknown("data set", arguments.data, (*datasets.NAMES, "FILE.npz", "FILE.csv"))
    if arguments.prune and not arguments.lr_search:
        raise ValueError("--prune needs --lr-search: it gives up learning rates of a search.")
    data = datasets.load(arguments.data, arguments.data_dir, arguments.download).part(arguments.examples)
    network = arguments.model or {"image": "mlp", "table": "mlp", "text": "gpt"}[data.kind]
    model = networks.build(network, data, 0)  # refuses what does not fit before anything is written
    for name in names:
        _check_optimizer(name, model, network)
    chosen = {
        "data": arguments.data,
        "model": network,
        "optimizers": names,
        "epochs": arguments.epochs,
        "batch size": arguments.batch_size,
        "training examples": len(data.train_x),
        "data fingerprint": data.fingerprint(),
        "lr search": arguments.lr_search,
        **({"pruning": arguments.prune} if arguments.prune else {}),
    }

    def carry_out(context: Context) -> Report:
        context.say(data.note)
        factors = (0.1, 1 / 3, 1.0, 3.0, 10.0)
        budget = Budget(factors, max(1, arguments.epochs // 3), None) if arguments.lr_search else None
        milestone = max(1, math.ceil(0.75 * arguments.epochs))
        task = Task(data, network, arguments.epochs, arguments.batch_size, milestones=(milestone,))
        results = compare(context, task, names, budget)
        report = Report(f"{network} on {data.name}")
        report.add_table(f"Test data, after {arguments.epochs} epochs", **table(results, SCORES))
        shown = curves(results, {"training loss": "train_loss", "test loss": "nll", "test error": "error"})
        falls = f"; lr falls tenfold after epoch {milestone}" if milestone < arguments.epochs else ""
        words = f"Mean and standard error over seeds{falls}. At most 2000 test examples."
        report.draw(context.folder / "curves.png", figures.curves, *shown, caption=words)
        if budget:
            report.settings["search budget"] = budget.words()
            rows = [
                [one.title, *(f"{lr:.2g}: {nll:.3f}" for (lr,), nll in one.tried.items())] for one in results.values()
            ]
            columns = ["optimizer", *(f"{factor:.2g} x usual" for factor in budget.factors)]
            report.add_table("Validation NLL of each lr tried", columns, rows)
        return report

    stem = Path(arguments.data).stem
    _carry_out(arguments, arguments.out / f"compare-{stem}-{network}", chosen, command, carry_out)


def _race(arguments: argparse.Namespace, command: str) -> None:
    import torch

    from bayesgrad_lab import race, race_page

    torch.set_num_threads(1)
    names, entrants = (
        list(dict.fromkeys(filter(None, map(str.strip, text.split(","))))) or list(table)
        for text, table in ((arguments.workloads, race.WORKLOADS), (arguments.optimizers, race.ENTRANTS))
    )
    race.check(names, entrants)
    hours = race.plan(arguments.scale, arguments.seeds, names, entrants)
    if not arguments.quiet:
        each = ", ".join(f"{name} {value:.2f}" for name, value in hours.items())
        total = race.OVERHEAD * sum(hours.values())
        print(f"At most {total:.2f} processor hours ({each}; a quarter more for validation and counting),")
        print(f"{total / 2:.2f} hours with two processes. Start the second one with --resume.")
    if arguments.phase == "plan":
        return
    folder, settings = arguments.out / f"race-{arguments.scale}", {"race": race.VERSION, "scale": arguments.scale}
    if arguments.phase == "run":
        if not (folder / race.TARGETS).exists():
            raise ValueError(f"{folder} has no targets: run 'bayesgrad race targets' first.")
        arguments.resume = True  # what the targets have begun
    if arguments.phase == "targets":
        _carry_out(arguments, folder, settings, command, lambda context: race_page.targets(context, names))
    else:
        work = partial(race_page.run, workloads=names, entrants=entrants, record=arguments.record)
        _carry_out(arguments, folder, settings, command, work)


def _carry_out(arguments: argparse.Namespace, folder: Path, settings: dict[str, Any], command: str, work: Any) -> None:
    """Runs `work` in its folder, with progress, and leaves a report."""
    from rich.console import Console

    from bayesgrad_lab.context import Context
    from bayesgrad_lab.store import open_folder, versions
    from bayesgrad_lab.terminal import Display, show

    _check_device(arguments.device)
    console = Console(quiet=arguments.quiet)
    settings = {**settings, "seeds": arguments.seeds, "device": arguments.device}
    open_folder(folder, settings, arguments.resume)
    with Display(console) as display:
        context = Context(
            folder,
            getattr(arguments, "scale", "laptop"),
            arguments.seeds,
            arguments.data_dir,
            arguments.download,
            arguments.device,
            display.say,
            display.progress,
            display.expect,
            storage=arguments.storage,
            pruner=getattr(arguments, "prune", ""),
        )
        report = work(context)
        report.command, report.versions = command, versions()
        report.settings = {**settings, **report.settings}
        page = report.save(folder)
    show(console, report)
    answer = Console()  # also with --quiet
    answer.print("The report is in", end=" ")
    answer.print(str(page), style="bold", markup=False, highlight=False, soft_wrap=True)


def _report(arguments: argparse.Namespace, command: str) -> None:
    import shutil

    from bayesgrad_lab.report import load, markdown, render
    from bayesgrad_lab.store import write_atomically

    reports = [(load(folder), folder) for folder in arguments.runs]
    names = [report.settings.get("experiment", folder.name) for report, folder in reports]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w .+-]+", name) or name.startswith("."):
            raise ValueError(f"{name!r} cannot be the name of a page: run it again with --resume.")
    if arguments.markdown and len(set(names)) < len(names):
        raise ValueError("two of these runs would become the same Markdown page: name them one at a time.")
    write_atomically(arguments.out, lambda path: path.write_text(render(reports), encoding="utf-8"))
    print(f"The report is in {arguments.out}")
    if arguments.markdown:
        arguments.markdown.mkdir(parents=True, exist_ok=True)
        for name, (report, folder) in zip(names, reports):
            for figure in report.figures:
                target = f"{name}-{figure['file']}"
                shutil.copyfile(folder / figure["file"], arguments.markdown / target)
                figure["file"] = target
            (arguments.markdown / f"{name}.md").write_text(markdown(report), encoding="utf-8")
            print(f"Markdown is in {arguments.markdown / name}.md")


def _bench(arguments: argparse.Namespace, command: str) -> int:
    from bayesgrad_lab.benchmarks import history

    return history.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
