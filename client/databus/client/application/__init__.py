"""What an application writes, sets and receives.

In reading order: ``consumer`` (the callbacks and the delivery guarantee), ``events`` (events and
windows), ``row_columns`` (many rows decoded at once, as rows or columns), ``row_models`` (rows as
the application's classes), ``json_documents`` (JSON and arrays as Python objects), ``options``
(every setting), ``frame_blocks`` (the frames below the events), ``signal_stops`` (how ``run``
ends).

Imported by the rest of the room.  It imports ``databus.common`` alone.
"""
