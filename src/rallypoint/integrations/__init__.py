"""What frameworks know of a script's steps, passed on to :func:`rallypoint.progress`.

One line in the script, and `rally run`, `rally ps`, `rally top` and metrics show how far it is::

    from rallypoint.integrations.tqdm import tqdm  # instead of: from tqdm import tqdm
    from rallypoint.integrations.transformers import ProgressCallback  # Trainer(callbacks=[ProgressCallback()])
    from rallypoint.integrations.lightning import ProgressCallback  # the same, for Lightning's Trainer

Each module needs its framework, and this package imports none of them. Without `rally run` they change nothing.
"""
