"""Figures of the papers: an analysis of the runs gives a number for each of them, and a picture beside the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from polyfed.compare import folder_of
from polyfed.reproduce.entries import Entry
from polyfed.reproduce.quantities import Values
from polyfed.reproduce.results import Result

PICTURES = Path("docs") / "reproductions" / "figures"
Drawn = tuple[Values, Mapping[str, Any]]  # numbers of a run, figures


def analyzed(entry: Entry, scale: str, result: Result, root: Path, runs: Path) -> None:
    """Add what the entry's analysis says about every run that it has not seen yet; draw the first seed of each."""
    name = entry.told.get("analysis")
    if name is None:
        return
    analysis, options = ANALYSES[name], dict(entry.told.get("options", {}))
    for case in entry.cases(scale):
        made = entry.experiment(scale, case)
        for label, seeds in result.case(case.name).runs.items():
            for seed, values in seeds.items():
                folder = runs / entry.folder(scale, case) / folder_of(made.config(label, int(seed)))
                if "analyzed" in values or not (folder / "result.json").is_file():
                    continue
                numbers, figures = analysis(folder, **options)
                values |= {key: round(value, 6) for key, value in numbers.items()} | {"analyzed": 1.0}
                if int(seed) == made.base.seed:
                    draw(entry, scale, result, root, f"{case.name}-{label}-", figures)


def curves_of(entry: Entry, label: str) -> dict[str, str]:
    """Return the curves of a label, by name: its accuracy of the one kind that the entry draws, or of each kind."""
    drawn = entry.told.get("curve", ())
    return {label: drawn} if isinstance(drawn, str) else {f"{label}, {kind}": kind for kind in drawn}


def draw_curves(entry: Entry, scale: str, result: Result, root: Path) -> None:
    """Draw the accuracy by round of an entry that is a figure of curves: the mean over seeds, for each case."""
    from polyfed.analysis.figures import lines

    for case in entry.cases(scale):
        curves, bands = {}, {}
        for label, seeds in result.case(case.name).curves.items():
            rounds = [round_ for round_, _ in next(iter(seeds.values()))]
            columns = list(zip(*([value for _, value in points] for points in seeds.values()), strict=True))
            curves[label] = (rounds, [fmean(column) for column in columns])
            bands[label] = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
        if curves:
            kind = entry.told["curve"]
            what = f"{f'{kind} ' if isinstance(kind, str) else ''}accuracy, %"
            few = len(curves) <= 4  # bands of more would hide each other
            title = f"{case.title}: means{', one standard deviation' if few else ''} over seeds"
            figure = lines(title, "round", what, curves, errors=bands if few else None)
            draw(entry, scale, result, root, f"{case.name}-", {"curves": figure})


def on_axis(entry: Entry, scale: str, result: Result) -> dict[str, dict[float, Sequence[float]]]:
    """Return a curve for each label where cases are values on the entry's axis, else for each case: value -> seeds.

    `axis = {name = "alpha", cases = {a1 = 1.0, a02 = 0.2}}`, or `labels = {fedin-batch-8 = 8, fedin = 16}`.
    """
    axis, curves = entry.told["axis"], dict[str, dict[float, Sequence[float]]]()
    for case in entry.cases(scale):
        for label, seeds in result.case(case.name).runs.items():
            by_case = "cases" in axis
            name, place = (label, axis["cases"].get(case.name)) if by_case else (case.title, axis["labels"].get(label))
            values = [found[entry.quantity] for found in seeds.values() if entry.quantity in found]
            if place is not None and values:
                curves.setdefault(name, {})[float(place)] = values
    return curves


def draw_axis(entry: Entry, scale: str, result: Result, root: Path) -> None:
    """Draw an entry over its axis, values evenly spaced: means over seeds in bands of a standard deviation."""
    from polyfed.analysis.figures import lines

    if "axis" not in entry.told:
        return
    found = on_axis(entry, scale, result)
    places = sorted({place for points in found.values() for place in points})
    curves, errors = {}, {}
    for name, points in found.items():
        ordered = sorted(points)
        curves[name] = [places.index(place) for place in ordered], [fmean(points[place]) for place in ordered]
        errors[name] = [stdev(points[place]) if len(points[place]) > 1 else 0.0 for place in ordered]
    title = f"{entry.path}, {scale}: {entry.experiment(scale, entry.cases(scale)[0]).base.data.source}"
    what, ticks = f"{entry.quantity} accuracy, %", [f"{place:g}" for place in places]
    figure = lines(title, entry.told["axis"]["name"], what, curves, ticks, errors=errors)
    draw(entry, scale, result, root, "", {"axis": figure})


def redraw(entry: Entry, scale: str, result: Result, root: Path) -> None:
    """Draw again what follows from the result file alone: curves, and what is over an axis."""
    draw_curves(entry, scale, result, root)
    draw_axis(entry, scale, result, root)


def draw(entry: Entry, scale: str, result: Result, root: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write pictures beside the result, and name them in it."""
    from polyfed.report.static import save

    for kind, figure in figures.items():
        file = PICTURES / f"{entry.paper}-{entry.name}-{scale}-{name}{kind}.png"
        save(figure, root / file)
        if file.name not in result.figures:
            result.figures.append(file.name)


def cka(folder: Path, samples: int = 300, clients: int = 10) -> Drawn:
    """Return the mean CKA between clients by stage; the last two by their place too, since depths differ by scale."""
    from polyfed.analysis.cka import cka_figures, compare_clients
    from polyfed.analysis.opening import open_run

    found = compare_clients(open_run(folder), samples, clients)
    numbers = {f"cka {stage}": part["mean"] for stage, part in found["stages"].items()}
    stages = [name for name in numbers if name.startswith("cka stage")]
    for name, place in (("last", -1), ("last but one", -2)):
        if len(stages) >= -place:
            numbers[f"cka {name} stage"] = numbers[stages[place]]
    return numbers, cka_figures([found])


def embedding(folder: Path, **options: Any) -> Drawn:
    """Return how far apart classes and clients are in feature space."""
    from polyfed.analysis.embedding import embed_clients, embedding_figures
    from polyfed.analysis.opening import open_run

    found = embed_clients(open_run(folder), **options)
    numbers = {name: found[f"silhouette_{name}"] for name in ("classes", "clients")}
    return {f"silhouette {name}": value for name, value in numbers.items() if value == value}, embedding_figures(
        [found]
    )


def ensemble(folder: Path, samples: int = 300) -> Drawn:
    """Return how far apart true classes are in what all clients together know: mean logits, and mean features."""
    from polyfed.analysis.embedding import embed_ensemble, ensemble_figures
    from polyfed.analysis.opening import open_run

    found = embed_ensemble(open_run(folder), samples)
    return {f"silhouette {kind}": part["silhouette"] for kind, part in found["kinds"].items()}, ensemble_figures(found)


def reconstruction(folder: Path, noise: Sequence[float] = (0.0, 0.8), samples: int = 8, steps: int = 400) -> Drawn:
    """Return the error of reconstructed images and the attacker's loss, by level of noise."""
    from polyfed.analysis.opening import open_run
    from polyfed.analysis.reconstruction import attack_client, reconstruction_figures

    found = attack_client(open_run(folder), 0, tuple(noise), samples, steps, 0, "statistics")
    numbers = {}
    for one in found["attacks"]:
        numbers[f"error {one['noise']:g}"] = one["mse"]
        numbers[f"loss {one['noise']:g}"] = one["losses"][-1]
    return numbers, reconstruction_figures([found])


def synthetic(folder: Path, count: int = 32) -> Drawn:
    """Return the squared error of decoded class means against real ones, and that of the mean image for all classes."""
    from polyfed.analysis.figures import image_grid
    from polyfed.analysis.opening import open_run
    from polyfed.analysis.synthetic import class_samples

    run = open_run(folder)
    made = class_samples(folder, count)
    test, labels = run.clients.test, run.clients.test.labels()
    pixels = test.inputs()
    low, high = pixels.amin(), pixels.amax()
    pixels = (pixels - low) / (high - low)  # decoded images are in [0, 1]
    mean = pixels.mean(0)
    real = {label: pixels[labels == label].mean(0) for label in made}
    errors = [float((images.detach().mean(0) - real[label]).square().mean()) for label, images in made.items()]
    plain = [float((mean - image).square().mean()) for image in real.values()]
    rows = {}
    for label, images in made.items():
        rows[f"class {label}"] = images.detach()[:8]
        rows[f"class {label}, real"] = pixels[labels == label][:8]
    numbers = {"image error": sum(errors) / len(errors), "mean image error": sum(plain) / len(plain)}
    return numbers, {"samples": image_grid("Synthetic samples, and real ones", rows)}


ANALYSES: dict[str, Callable[..., Drawn]] = {
    "cka": cka,
    "embedding": embedding,
    "ensemble": ensemble,
    "reconstruction": reconstruction,
    "synthetic": synthetic,
}
