"""`vtoken` with a seeded fault: `python -m support.mutated NAME ARGUMENT...`, in a process of its
own, since an engine that a command closes takes down what other engines of its process share."""

from __future__ import annotations

import sys

from mutants.catalogue import WALKED

from support.mutation import applied
from vtoken import cli


def main() -> None:
    name, sys.argv = sys.argv[1], ["vtoken", *sys.argv[2:]]
    (fault,) = (each for each in WALKED if each.name == name)
    with applied(fault):
        cli.main()


if __name__ == "__main__":
    main()
