"""A common model that does not take the data is named as such, and never in the refusal of another method."""

import numpy as np
import pytest

import polyfed as pf
from polyfed.core.errors import InputError

TEXTS = [f"{'good' if row % 2 else 'bad'} thing {row}" for row in range(40)]


@pytest.fixture(scope="module")
def clients():
    return pf.split(pf.load((TEXTS, np.arange(40) % 2)), 2, by="iid")


def test_a_refused_method_names_those_that_fit_the_texts(clients):
    with pytest.raises(InputError, match="fedavg needs weights that two clients have in common") as found:
        pf.run("fedavg", clients, ["lstm:1x8", "transformer:1x8"], rounds=1)
    assert "mlp" not in str(found.value) and "fedmd" not in str(found.value).split("would work:")[0]


@pytest.mark.parametrize("method", ["fml", "fedkd", "fedmrl", "pfedafm", "fedtype"])
def test_the_common_model_is_named_where_it_does_not_take_the_data(clients, method):
    with pytest.raises(InputError, match=f"{method} needs a common model that takes the data, but 'mlp:1x64' does not"):
        pf.run(method, clients, ["lstm:1x8"], rounds=1)


@pytest.mark.parametrize("method", [pf.FML, pf.FedMRL])
@pytest.mark.parametrize("proxy", ["cnn1d:1x8", "hf:distilbert,dim=8,n_layers=1,n_heads=2,hidden_dim=8"])
def test_one_that_takes_the_data_runs(clients, method, proxy):
    pytest.importorskip("transformers")
    assert pf.run(method(proxy=proxy), clients, ["lstm:1x8"], rounds=1).rounds == 1
