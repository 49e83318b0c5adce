"""Entry point of `python -m phasicrl`. Kind: effects."""

from phasicrl.cli import main

raise SystemExit(main())
