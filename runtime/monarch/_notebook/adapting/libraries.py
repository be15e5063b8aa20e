"""Libraries that show something or start processes, adapted on ranks when the program imports them."""

from __future__ import annotations

import os
from typing import Any

from monarch._actors.letting_go import lets_go
from monarch._notebook.adapting.import_hooks import when_imported
from monarch._notebook.adapting.progress import adapt_rich, adapt_tqdm, adapt_tqdm_notebook
from monarch._notebook.showing.display import (
    clear_output,
    current_display,
    display,
    publish_display_data,
    update_display,
)
from monarch._notebook.showing.figures import leave_inline_backend
from monarch._procs.rank.spawned import spawn_by_value
from monarch._tensors.torch_compat import hasten_loaders


def adapt_libraries() -> None:
    """Let displays, figures and progress bars of libraries reach the notebook."""
    leave_inline_backend()
    # Otherwise it opens a browser on the machine of the rank.
    os.environ.setdefault("PLOTLY_RENDERER", "plotly_mimetype")
    for module in ("IPython.core.display_functions", "IPython.display"):
        when_imported(module, _adapt_display)
    when_imported("matplotlib.pyplot", _adapt_pyplot)
    when_imported("tqdm.std", adapt_tqdm)
    when_imported("tqdm.notebook", adapt_tqdm_notebook)
    when_imported("rich.live", adapt_rich)
    when_imported("multiprocessing.reduction", lambda _: spawn_by_value())
    when_imported("torch.utils.data.dataloader", lambda module: hasten_loaders(module, lets_go))


def _adapt_display(module: Any) -> None:
    """Put displays of ranks in the place of IPython's, which need a shell."""
    for function in (display, update_display, clear_output, publish_display_data):
        setattr(module, function.__name__, function)


def _adapt_pyplot(module: Any) -> None:
    def show(*_: Any, **__: Any) -> None:
        """Show all open figures in the notebook, and close them."""
        current_display().show_figures()

    module.show = show
