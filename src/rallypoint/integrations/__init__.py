"""Adapters that pass a framework's own step counts on to :func:`rallypoint.progress`.

With one line in the script, `rally run`, `rally ps`, `rally top` and the metrics show how far it is::

    from rallypoint.integrations.tqdm import tqdm  # instead of: from tqdm import tqdm
    from rallypoint.integrations.transformers import ProgressCallback  # Trainer(callbacks=[ProgressCallback()])
    from rallypoint.integrations.lightning import ProgressCallback  # the same, for Lightning's Trainer

Each module needs its framework; this package itself imports none. Without `rally run` the modules change nothing.
"""
