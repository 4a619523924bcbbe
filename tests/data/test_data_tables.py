"""Feature tables: which columns are features, in which order, and what is left out and said."""

from __future__ import annotations

import numpy as np
import pytest

from polyfed.core.errors import InputError
from polyfed.data import ByColumn, load, split

LABELS = [0, 1, 0, 1, 0, 1]


def table(**columns):
    import datasets

    return datasets.Dataset.from_dict({**columns, "label": LABELS})


def saved(folder, name="train", **columns):
    table(**columns).to_parquet(folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


AGES, DOSES = [40.0, 50, 60, 70, 80, 90], [1, 2, 1, 2, 1, 3]


@pytest.mark.parametrize(
    "name", ["id", "ID", "Id", "uuid", "index", "patient_id", "patientId", "PatientID", "Unnamed: 0"]
)
def test_an_identifier_is_not_a_feature(tmp_path, name):
    file = saved(tmp_path, **{name: [17, 4, 99, 3, 5, 6], "age": AGES})
    data = load(file, test=file, normalize=False)
    assert data.input_shape == (1,) and data.train.inputs()[:, 0].tolist() == AGES
    assert data.columns[name].tolist() == [17, 4, 99, 3, 5, 6]
    assert f"column '{name}' is an identifier, not a feature" in repr(data)
    again = load(file, test=file, normalize=False)  # from the cache
    assert again.notes == data.notes and again.features == ("age",)
    assert "is an identifier" in split(data, clients=2).describe()


@pytest.mark.parametrize("name", ["id", "patient_id", "patientid"])
def test_a_patient_with_several_rows_is_no_feature_either(name):
    part = table(**{name: [1, 1, 2, 2, 3, 3], "age": AGES})
    assert load(part, test=part).features == ("age",)


@pytest.mark.parametrize("name", ["subject", "record_number", "row", "sample", "key"])
def test_a_number_of_its_own_in_every_row_is_no_feature(name):
    part = table(**{name: [17, 4, 99, 3, 5, 6], "age": AGES})
    assert load(part, test=part).features == ("age",)


def test_an_identifier_that_is_named_is_a_feature(tmp_path):
    file = saved(tmp_path, id=[17, 4, 99, 3, 5, 6], age=AGES)
    data = load(file, test=file, inputs=["id", "age"], normalize=False)
    assert data.train.inputs()[0].tolist() == [17, 40] and data.notes == () and data.features == ("id", "age")
    assert load(file, test=file, inputs="id", normalize=False).train.inputs()[:2].tolist() == [[17], [4]]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("subject", [1, 1, 2, 2, 3, 3]),  # repeats: it may be the school subject
        ("patient_id", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]),  # not whole
        ("age_index", [1, 2, 3, 4, 5, 6]),  # a measurement
        ("width", [1, 2, 3, 4, 5, 6]),
        ("paid", [1, 2, 3, 4, 5, 6]),
        ("grid", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_columns_that_only_resemble_an_identifier_stay_features(name, values):
    data = load(table(**{name: values, "age": AGES}), test=table(**{name: values, "age": AGES}))
    assert data.features == (name, "age") and data.notes == ()


def test_a_table_with_nothing_but_an_identifier_is_refused():
    with pytest.raises(InputError, match=r"no image or feature columns besides 'label'.*id.*inputs="):
        load(table(id=[1, 2, 3, 4, 5, 6]))


def test_the_test_part_has_the_features_of_the_training_part_in_their_order(tmp_path):
    saved(tmp_path, id=[1, 2, 3, 4, 5, 6], age=AGES, dose=DOSES)
    saved(tmp_path, "test", dose=DOSES, age=AGES, id=[1, 1, 1, 1, 1, 1])
    data = load(tmp_path, normalize=False)
    assert data.features == ("age", "dose") and np.array_equal(data.train.inputs(), data.test.inputs())
    objects = load(table(age=AGES, dose=DOSES), test=table(dose=DOSES, age=AGES), normalize=False)
    assert np.array_equal(objects.train.inputs(), objects.test.inputs())
    saved(tmp_path, "test", age=AGES, weight=DOSES)
    with pytest.raises(InputError, match=r"test.parquet has no column 'dose': its columns are age, weight, label"):
        load(tmp_path)


def test_a_public_file_has_the_features_of_the_clients_in_their_order(tmp_path):
    file, shared = saved(tmp_path, age=AGES, dose=DOSES), saved(tmp_path, "shared", dose=DOSES, age=AGES)
    data = load(file, test=file, normalize=False)
    public = split(data, clients=2, public=f"{shared}:4").public.inputs()
    assert set(public[:, 0].tolist()) < set(AGES) and public[:, 1].max() <= 3
    assert split(data, clients=2, public=table(dose=DOSES, age=AGES)).public.inputs()[:, 0].tolist() == AGES


def test_parts_have_the_features_of_the_first_in_their_order():
    from polyfed.data import Clients

    parts = [table(age=AGES, dose=DOSES), table(dose=DOSES, age=AGES)]
    clients = Clients.from_parts(parts, test=parts[1], normalize=False)
    assert np.array_equal(clients.train[0].inputs(), clients.train[1].inputs())
    assert np.array_equal(clients.train[0].inputs(), clients.test.inputs())


@pytest.mark.parametrize("sites", [[1, 1, 2, 2, 3, 3], ["north", "north", "south", "south", "west", "west"]])
def test_the_column_that_divides_the_rows_is_no_feature(tmp_path, sites):
    file = saved(tmp_path, site=sites, age=AGES)
    data = load(file, test=file)
    assert "site" in data.features  # nobody said yet what it is for
    clients = split(data, by=ByColumn("site"))
    assert clients.names == tuple(map(str, sorted(set(sites)))) and clients.input_shape == (1,)
    assert [samples.x[samples.rows()].flatten().tolist() for samples in clients.train] == [
        AGES[0:2],
        AGES[2:4],
        AGES[4:6],
    ]
    assert clients.test.x.shape == (6, 1) and "divides the rows" in clients.describe()
    beside = load(file, test=file, columns="site")
    assert beside.features == ("age",) and len(split(beside, by=ByColumn("site"))) == 3


def test_empty_cells_get_the_mean_and_a_mark(tmp_path):
    file = saved(tmp_path, age=[40.0, None, 60, None, 80, 90], dose=DOSES)
    data = load(file, test=file)
    assert data.train.x[:, 0].tolist() == [40, 67.5, 60, 67.5, 80, 90]
    assert data.train.x[:, 2].tolist() == [0, 1, 0, 1, 0, 0]
    assert data.train.inputs()[:, 2].tolist() == [0, 1, 0, 1, 0, 0]  # a mark is not scaled
    assert "a mark beside it: age (2 rows)" in repr(data)
