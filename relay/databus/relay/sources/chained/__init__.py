"""The source that is another relay.

``chained_source`` follows one of several parents; ``parent_relay`` is one parent's HTTP.
"""
