"""Records: whole or not at all, with raw figures and the environment."""

import json

import numpy as np
import pytest
import torch

from rosellm.bench.record import across_repeats, distribution, new_record, tokens_sha256, write_record
from rosellm.errors import RoseError

CPU = torch.device("cpu")


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    record = new_record("scheduler", CPU, figure=1 / 3, nothing=None)
    write_record(tmp_path / "record.json", record)
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert record["figure"] == 1 / 3
    assert record["environment"]["torch"] == torch.__version__


def test_a_record_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def full_disk(*_given, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rosellm.bench.record.write_text", full_disk)
    with pytest.raises(RoseError, match="No space left on device"):
        write_record(tmp_path / "record.json", {"figure": 2})


def test_a_figure_that_is_not_a_number_is_no_record(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(tmp_path / "record.json", {"figure": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_distribution_gives_mean_and_percentiles_of_the_known_values():
    values = [4.0, 1.0, None, 2.0]
    assert distribution("ttft", values, (50, 99)) == {
        "ttft_mean_s": 7 / 3,
        "ttft_p50_s": 2.0,
        "ttft_p99_s": np.percentile([1.0, 2.0, 4.0], 99),
    }
    assert distribution("tpot", [None], (50,)) == {"tpot_mean_s": None, "tpot_p50_s": None}


def test_medians_and_means_go_over_the_repeats_of_every_numeric_figure():
    repeats = [{"time_s": t, "tokens": 8, "sha": "x", "memory": None} for t in (3.0, 1.0, 8.0)]
    result = across_repeats(repeats)
    assert result["repeats"] == repeats
    assert result["medians"] == {"time_s": 3.0, "tokens": 8.0}
    assert result["means"] == {"time_s": 4.0, "tokens": 8.0}


def test_the_token_digest_depends_on_every_token_and_on_where_requests_end():
    digests = {tokens_sha256(outputs) for outputs in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2]])}
    assert len(digests) == 4
    assert tokens_sha256([[1, 2], [3]]) in digests
