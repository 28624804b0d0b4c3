"""Two processes with one CPU device each, joined by `jax.distributed` on this machine."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

START = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import amp_jax as amp

rank, port, *arguments = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
mesh = Mesh(np.array(jax.devices()), ("x",))
spread = lambda x, spec: jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda i: x[i])
said = {}
"""


def run(script: str, *arguments: str) -> list[dict[str, Any]]:
    """What each of the two put into `said`: a script finds there `rank`, `arguments`, `mesh` and `spread`."""
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    code = START + textwrap.dedent(script) + "\nprint(json.dumps(said))"
    command = [sys.executable, "-W", "error", "-c", code]
    port = str(free_port())
    both = [
        subprocess.Popen(
            [*command, str(rank), port, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [one.communicate(timeout=120) for one in both]
    finally:
        for one in both:
            one.kill()
    assert [one.returncode for one in both] == [0, 0], told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
