-- What capture needs beside the rights on its own database.
GRANT REPLICATION SLAVE, REPLICATION CLIENT, BINLOG MONITOR, RELOAD ON *.* TO 'databus'@'%';
