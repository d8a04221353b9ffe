"""Pages of the manual that are made of the code: ``make docs`` writes them into the site.

They are made at each build and are not committed: a committed copy would have to be renewed with
every change of a key, an option or a metric, and would conflict between branches.

``hooks`` is what MkDocs calls; ``configuration``, ``commands``, ``endpoints``, ``metrics``,
``errors`` and ``library`` each make one page.
"""
