"""`polyfed analyze NAME RUN...`: every analysis by name, its figures and numbers written to a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.command import options_of
from polyfed.core.checkpoint import write_json
from polyfed.core.errors import InputError, unknown
from polyfed.core.fields import AtLeastOne, Count, NotNegative

FORMATS = ("png", "pdf")
Outcome = tuple[Any, dict[str, Any], list[str]]  # numbers, figures, sentences


def analyze(
    name: str, runs: Sequence[str | Path], out: str | Path | None = None, settings: Sequence[str] = ()
) -> Iterator[str]:
    """Run an analysis on run directories, write figures and `numbers.json`, and yield what to tell the user.

    Raises
    ------
    InputError
        For an unknown analysis or option.
    """
    if name not in ANALYSES:
        raise unknown("analysis", name, ANALYSES)
    work = ANALYSES[name]
    options = options_of(name, work, settings, leave=("paths",))
    paths = [folder for run in runs for folder in _run_folders(Path(run), name)]
    numbers, figures, sentences = work(paths, **options)
    folder = Path(out) if out is not None else Path(runs[0]) / "analysis" / name
    from polyfed.report.static import save

    for title, figure in figures.items():
        for ending in FORMATS:
            if isinstance(figure, Path):
                continue
            save(figure, folder / f"{title}.{ending}")
    write_json(folder / "numbers.json", _finite(numbers))
    yield from sentences
    yield f"Figures and numbers are in {folder}"


def _run_folders(path: Path, name: str) -> list[Path]:
    """Return the runs in a folder; a comparison stands for its first seed, where an analysis opens models."""
    if not path.exists():
        raise InputError(f"There is no {path}: name the --out of a run or a comparison.")
    if name == "robustness" or (path / "config.json").is_file():
        return [path]
    found = sorted(file.parent for file in path.glob("*/seed-*/config.json"))
    if not found:
        raise InputError(f"There is no run in {path}: name the --out of a run or a comparison.")
    first = min(int(folder.name.removeprefix("seed-")) for folder in found)
    return [folder for folder in found if folder.name == f"seed-{first}"]


def _finite(value: Any) -> Any:
    """Write numbers that JSON does not know as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# --- the analyses: paths and options in, numbers, figures and sentences out ---


def cka(paths: Sequence[Path], samples: AtLeastOne = 300, clients: AtLeastOne = 10) -> Outcome:
    """Compare the clients' representations stage by stage."""
    from polyfed.analysis.cka import cka_figures, compare_clients
    from polyfed.analysis.opening import open_run

    found = [compare_clients(open_run(path), samples, clients) for path in paths]
    sentences = [
        f"{run['method']}: mean CKA between clients "
        + ", ".join(f"{stage} {entry['mean']:.3f}" for stage, entry in run["stages"].items())
        for run in found
    ]
    return found, cka_figures(found), sentences


def embedding(
    paths: Sequence[Path],
    samples: AtLeastOne = 200,
    clients: AtLeastOne = 5,
    label: Count | None = None,
    stage: str = "features",
    seed: int = 0,
) -> Outcome:
    """Draw features of the same samples by class and by network."""
    from polyfed.analysis.embedding import embed_clients, embedding_figures
    from polyfed.analysis.opening import open_run

    found = [embed_clients(open_run(path), samples, clients, label, stage, seed) for path in paths]
    sentences = [
        f"{run['method']}: silhouette of classes {run['silhouette_classes']:.2f}, "
        f"of clients {run['silhouette_clients']:.2f} (lower: better mixed)"
        for run in found
    ]
    return found, embedding_figures(found), sentences


def reconstruction(
    paths: Sequence[Path],
    client: Count = 0,
    noise: tuple[NotNegative, ...] | NotNegative = (0.0, 0.8),
    samples: AtLeastOne = 8,
    steps: AtLeastOne = 2000,
    seed: int = 0,
    batchnorm: str = "statistics",
) -> Outcome:
    """Attack the features of a client's images."""
    from polyfed.analysis.opening import open_run
    from polyfed.analysis.reconstruction import attack_client, reconstruction_figures

    levels = noise if isinstance(noise, tuple) else (noise,)
    found = [attack_client(open_run(path), client, levels, samples, steps, seed, batchnorm) for path in paths]
    sentences = [
        f"{run['method']}, client {run['client']}, noise {one['noise']:g}: "
        f"final loss {one['losses'][-1]:.4f}, image error {one['mse']:.4f}, PSNR {one['psnr']:.1f} dB"
        for run in found
        for one in run["attacks"]
    ]
    return found, reconstruction_figures(found), sentences


def robustness(paths: Sequence[Path]) -> Outcome:
    """Draw accuracy by the alpha of the Dirichlet split."""
    from polyfed.analysis.robustness import accuracy_by_alpha, robustness_figures

    found = accuracy_by_alpha(paths)
    sentences = [
        f"{label} ({entry['of']}): "
        + ", ".join(f"alpha {row['alpha']:g}: {100 * row['accuracy']:.1f} %" for row in entry["rows"])
        for label, entry in found["methods"].items()
    ]
    return found, robustness_figures(found), sentences


def confidence(paths: Sequence[Path], client: Count = 0) -> Outcome:
    """Compare the absolute confidence of a client's model on labels that it holds and on others."""
    from polyfed.analysis.confidence import compare_confidence
    from polyfed.analysis.figures import quartiles
    from polyfed.analysis.opening import open_run

    found, figures, sentences = [], {}, []
    for path in paths:
        run = open_run(path)
        if client not in run.models or client >= len(run.clients):
            raise InputError(f"There is no client {client} in {path}.")
        counts = run.clients.train[client].label_counts(run.clients.num_classes)
        held = [label for label, number in enumerate(counts) if number]
        compared = compare_confidence(run.models[client], run.clients.test, held)
        entry = {"method": run.label, "client": client, "held": held, **compared}
        del entry["values"], entry["labels"]
        found.append(entry)
        parts = {int(label): part["quartiles"] for label, part in entry["by_label"].items()}
        groups = {
            "labels that it holds": {label: part for label, part in parts.items() if label in held},
            "other labels": {label: part for label, part in parts.items() if label not in held},
        }
        title = f"{run.label}, client {client}: absolute confidence by label (AUROC {entry['auroc']:.2f})"
        figures[f"confidence-{run.label}"] = quartiles(title, "label", "log10 confidence, quartiles", groups)
        sentences.append(f"{run.label}, client {client}: AUROC of held against other labels {entry['auroc']:.3f}")
    return found, figures, sentences


def disturbing(paths: Sequence[Path], seeds: AtLeastOne = 40, epochs: AtLeastOne = 600) -> Outcome:
    """Fuse two small networks in two dimensions over many seeds; the run only says where to write."""
    from polyfed.analysis.disturbing import disturbing as study

    found = study(seeds, epochs, examples=range(seeds))
    numbers = found["summary"]
    sentence = (
        f"{numbers['seeds']} seeds: fused {100 * numbers['fused']:.1f} % on average, no better than the better local "
        f"network in {100 * numbers['failed']:.0f} % of them; AMS-top1 {100 * numbers['ams_top1']:.1f} %"
    )
    told = json.loads(json.dumps({"summary": numbers, "runs": found["runs"]}))
    return told, disturbing_figures(found), [sentence]


def disturbing_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return accuracies by rank, the histogram of the sum, and the points of its worst and of its best seed."""
    import numpy as np

    from polyfed.analysis.figures import histogram, label_probabilities, lines

    ranks = list(range(1, len(found["runs"]) + 1))
    names = {
        "left": "left network",
        "right": "right network",
        "fused": "sum of both",
        "ams_top1": "AMS-top1",
        "ensemble": "ensemble",
    }
    curves = {
        heading: (ranks, np.sort([100 * run[name] for run in found["runs"]]).tolist())
        for name, heading in names.items()
    }
    numbers = found["summary"]
    title = f"Fusing two networks in 2D: the sum is no better in {100 * numbers['failed']:.0f} % of {len(ranks)} seeds"
    worst = min(found["runs"], key=lambda run: run["fused"])
    best = max(found["runs"], key=lambda run: run["fused"])

    def example(run: Mapping[str, Any], what: str) -> Any:
        shown = found["examples"][str(run["seed"])]
        labels = np.asarray(shown["labels"])
        right = {
            f"{names[name]}: {100 * run[name]:.0f} %": np.where(labels == 1, above, 1 - np.asarray(above))
            for name, above in shown["above"].items()
        }
        return label_probabilities(
            f"Seed {run['seed']}, where the sum is {what}: pale points are taken for the other label",
            np.asarray(shown["points"]),
            labels,
            ("below the line", "above the line"),
            right,
        )

    return {
        "disturbing": lines(title, "seeds, each curve by its own rank", "accuracy, %", curves),
        "disturbing-histogram": histogram(
            "The sum of both networks over all seeds",
            "accuracy, %",
            "seeds",
            [100 * run["fused"] for run in found["runs"]],
            range(min(95, int(20 * worst["fused"]) * 5), 101, 5),
        ),
        "disturbing-example": example(worst, "worst"),
        "disturbing-success": example(best, "best"),
    }


def synthetic(paths: Sequence[Path], count: AtLeastOne = 8, seed: int = 0) -> Outcome:
    """Draw synthetic samples of FedVTC's decoder."""
    from polyfed.analysis.figures import image_grid
    from polyfed.analysis.synthetic import class_samples

    figures, found = {}, []
    for path in paths:
        samples = class_samples(path, count, seed=seed)
        rows = {f"class {label}": images.detach() for label, images in samples.items()}
        figures[f"samples-{path.name}"] = image_grid("Synthetic samples", rows)
        found.append({"run": path.name, "classes": list(samples)})
    return found, figures, [f"Decoded {count} samples of each of {len(entry['classes'])} classes" for entry in found]


ANALYSES: dict[str, Callable[..., Outcome]] = {
    "cka": cka,
    "embedding": embedding,
    "reconstruction": reconstruction,
    "robustness": robustness,
    "confidence": confidence,
    "disturbing": disturbing,
    "synthetic": synthetic,
}
