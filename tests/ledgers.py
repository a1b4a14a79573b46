"""A made-up ledger, for what reads ledgers and what draws them."""

from rosellm.lab.records.account import Row
from rosellm.lab.records.host_functions import HostFunction
from rosellm.lab.records.ledger import Ledger

ROWS = (
    Row("GEMM", "work", 60.0, 0.6, 48, 30.0),
    Row("head", "work", 10.0, 0.1, 1, 5.0),
    Row("copy HtoD", "copies", 5.0, 0.05, 2),
    Row("between kernels", "gaps", 15.0, 0.15, 40),
    Row("host: sample", "host", 6.0, 0.06, 1),
    Row("host: model", "host", 4.0, 0.04, 3),
)  # fmt: skip


def ledger_of(rows, name="here", **changes) -> Ledger:
    step = sum(row.us for row in rows)
    values = {
        "step_us": step,
        "profiled_us": 2 * step,
        "busy_us": 0.75 * step,
        "steps": 2,
        "on_gpu": True,
        "batch": 8,
        "context": 9.5,
        "functions": (HostFunction("`dense.Dense.decode`", 30.0, 1), HostFunction("9 others", 10.0, 12.5)),
    }
    return Ledger(name, tuple(rows), **values | changes)
