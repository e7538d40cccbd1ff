"""The fork server of multiprocessing imports this module, if a DataLoader uses it: see workers.py.

The server then ignores SIGTERM unless the trainer sends it. It ends with the trainer. The processes that it forks do what they do without
Nebula.
"""

import os
import signal

from .. import _nebula

_nebula.end_only_by(os.getppid())
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
