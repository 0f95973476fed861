"""PyTorch's recurrent modules, truncated: drop-ins that run where the originals do not."""

from rnnaudit.modules.forms import Cut
from rnnaudit.modules.truncated import Cuts, Truncated, truncate_

__all__ = ["Cut", "Cuts", "Truncated", "truncate_"]
