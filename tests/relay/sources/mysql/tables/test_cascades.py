"""The actions of foreign keys in a table's definition."""

from __future__ import annotations

from databus.relay.sources.mysql.tables.cascades import actions_in

DEFINITION = """CREATE TABLE `child` (
  `id` int(11) NOT NULL,
  `on` int(11) DEFAULT NULL COMMENT 'CONSTRAINT `x` FOREIGN KEY ON DELETE CASCADE',
  `on update cascade` int(11) DEFAULT NULL CHECK (`on` > 1),
  PRIMARY KEY (`id`),
  KEY `on` (`on`),
  CONSTRAINT `plain` FOREIGN KEY (`on`) REFERENCES `p` (`id`),
  CONSTRAINT `both``s` FOREIGN KEY (`on`) REFERENCES `other`.`p` (`id`) ON DELETE SET NULL ON UPDATE CASCADE,
  CONSTRAINT `none` FOREIGN KEY (`on`) REFERENCES `p` (`id`) ON DELETE NO ACTION ON UPDATE CASCADE,
  CONSTRAINT `positive` CHECK (`id` > 0),
  CONSTRAINT `gone` FOREIGN KEY (`on`) REFERENCES `p` (`id`) ON DELETE CASCADE
) ENGINE=InnoDB COMMENT='ON DELETE CASCADE'"""  # noqa: E501  # as the server writes it


def test_a_definition_gives_the_actions_of_each_foreign_key_and_of_nothing_else() -> None:
    assert actions_in(DEFINITION, is_mysql=False) == {
        "plain": ("RESTRICT", "RESTRICT"),
        "both`s": ("SET NULL", "CASCADE"),
        "none": ("RESTRICT", "CASCADE"),
        "gone": ("CASCADE", "RESTRICT"),
    }
