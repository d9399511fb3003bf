"""``python -m diff_transformer.compare FOLDER explorer|-``: the process of one member of a comparison."""

import sys

from diff_transformer.compare.member import main

sys.exit(main())
