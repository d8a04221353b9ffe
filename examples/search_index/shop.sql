CREATE TABLE products (
    id integer PRIMARY KEY,
    name text NOT NULL,
    description text NOT NULL
);
INSERT INTO products VALUES
    (1, 'Steam kettle', 'Boils two litres in a minute'),
    (2, 'Garden chair', 'Oak, folds flat'),
    (3, 'Reading lamp', 'Warm light for long evenings');

CREATE ROLE databus_reader LOGIN REPLICATION PASSWORD 'secret';
GRANT SELECT ON products TO databus_reader;
CREATE PUBLICATION databus_shop FOR TABLE products WITH (publish_via_partition_root = true);
