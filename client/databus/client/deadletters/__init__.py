"""Events that a consumer could not take, stored until they are replayed.

In reading order: ``dead_letter`` (an event with what is needed to deliver it again),
``dead_letter_table`` (pure: statements), ``dead_letter_stores`` (a file, a table, an application's
own code), ``held_events`` (which events are held back behind a dead letter).
``delivery/dead_letter_replay`` delivers them again.

Imported by ``delivery`` and ``client``.  It imports ``application``, ``checkpoints``
and ``tables``.
"""
