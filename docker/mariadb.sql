-- What capture needs beside the rights on its own database.
GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO 'databus'@'%';
