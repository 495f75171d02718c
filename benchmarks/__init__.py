"""One script per question. Each runs as ``python benchmarks/wire.py`` and as ``python -m benchmarks.wire``.

Scripts import one another by bare names, as Python finds them beside a script. Here it finds them for ``-m``.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
