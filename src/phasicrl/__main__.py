"""`python -m phasicrl` is the `phasicrl` command. Kind: effects."""

from phasicrl.cli import main

raise SystemExit(main())
