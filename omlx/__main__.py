"""``python -m omlx``: the same as the ``omlx`` command."""

from omlx.cli import main

raise SystemExit(main())
