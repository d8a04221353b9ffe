"""A ``public`` schema that a hostile user has filled, found before pg_catalog by every session.

Everything in it reports its caller to the server's log.  It shadows the server's functions,
operators, types and catalogues, and has casts and constraints of types of its own.
"""

from __future__ import annotations

from tests.support.fixtures import FreshDatabase

MARK = "hostile call"

# For each function and operator of the server's that takes and gives plain types, one of the same
# name and types; for those that take any type, one for the types that a catalogue has.
_SHADOWS = """
DO $shadows$
DECLARE
    f record; v text; body text; made int := 0;
    plain regtype[] := ARRAY['int2','int4','int8','text','name','oid','bool','pg_lsn','char',
        'timestamptz','float8','numeric','bytea','regclass','regtype','int2vector','oidvector',
        'jsonb','json','pg_node_tree','xid','xid8','pg_snapshot','varchar','text[]','name[]',
        'oid[]','int2[]','interval','uuid','date','record']::regtype[];
BEGIN
    FOR f IN
        SELECT p.proname, p.oid, p.proretset, p.prorettype::regtype AS gives,
               pg_get_function_identity_arguments(p.oid) AS args, p.proargtypes::regtype[] AS types
        FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f'
        AND NOT p.proretset AND p.provariadic = 0
    LOOP
        CONTINUE WHEN f.gives::text IN ('internal', 'cstring', 'trigger', 'event_trigger',
            'language_handler', 'fdw_handler', 'index_am_handler', 'tsm_handler',
            'table_am_handler', 'anyelement', 'anyarray', 'record', 'void', 'any');
        IF f.types <@ plain OR f.types = '{}' THEN
            body := format('BEGIN RAISE LOG ''hostile call of function %s(%s) by %%'', '
                'current_user; RETURN NULL; END', f.proname, replace(f.args, '''', ''));
            EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
                f.proname, array_to_string(f.types, ','), f.gives, body);
            made := made + 1;
        END IF;
    END LOOP;
    FOREACH v IN ARRAY ARRAY['int2', 'text', 'name', 'oid'] LOOP
        EXECUTE format('CREATE FUNCTION public.array_position(%s[], %s) RETURNS int LANGUAGE '
            'plpgsql AS ''BEGIN RAISE LOG ''''hostile call of array_position by %%'''', '
            'current_user; RETURN 1; END''', v, v);
    END LOOP;
    FOREACH v IN ARRAY ARRAY['text', 'name', 'oid', 'int2', 'int8'] LOOP
        EXECUTE format('CREATE FUNCTION public.grow(%1$s, %1$s) RETURNS %1$s LANGUAGE plpgsql AS '
            '''BEGIN RAISE LOG ''''hostile call of an aggregate by %%'''', current_user; '
            'RETURN $1; END''', v);
        EXECUTE format('CREATE AGGREGATE public.min(%1$s) (sfunc = public.grow, stype = %1$s)', v);
        EXECUTE format('CREATE AGGREGATE public.sum(%1$s) (sfunc = public.grow, stype = %1$s)', v);
    END LOOP;
    FOR f IN
        SELECT o.oprname AS name, o.oprleft::regtype AS lefty, o.oprright::regtype AS righty,
               o.oprresult::regtype AS gives, row_number() OVER () AS number
        FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace
        AND o.oprkind = 'b' AND o.oprname IN ('=', '<>', '<', '<=', '>', '>=', '||', '+', '-', '~~',
            '!~~', '~', '->', '->>')
        AND o.oprleft = ANY (plain) AND o.oprright = ANY (plain)
    LOOP
        EXECUTE format('CREATE FUNCTION public.op_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS '
            '''BEGIN RAISE LOG ''''hostile call of operator %s by %%'''', current_user; '
            'RETURN NULL; END''', f.number, f.lefty, f.righty, f.gives, f.name);
        EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = public.op_%s, LEFTARG = %s, '
            'RIGHTARG = %s)', f.name, f.number, f.lefty, f.righty);
        made := made + 1;
    END LOOP;
    IF made < 500 THEN RAISE EXCEPTION 'only % shadows were made', made; END IF;
END $shadows$
"""

_ATTRIBUTE = (
    "attrelid, attname, atttypid, atttypmod, attnum, attnotnull, attisdropped, attgenerated"
)

_OWN = [
    "CREATE FUNCTION public.noted(what text, given anyelement) RETURNS bool LANGUAGE plpgsql AS "
    "$$BEGIN RAISE LOG 'hostile call of % by %', what, current_user; RETURN true; END$$",
    # Types of the catalogue's names: every cast to one of them runs the constraint.
    *(
        f"CREATE DOMAIN public.{name} AS pg_catalog.{name} CHECK (public.noted('type {name}', 1))"
        for name in ("oid", "pg_lsn", "name", "regclass", "regtype", "int8", "int2", "bytea")
    ),
    f"CREATE VIEW public.pg_attribute AS SELECT {_ATTRIBUTE} FROM pg_catalog.pg_attribute "
    "WHERE public.noted('view pg_attribute', 1)",
    # Catalogues of the same names, every row of which calls.
    *(
        f"CREATE VIEW public.{name} AS SELECT c.* FROM pg_catalog.{name} c "
        f"WHERE public.noted('view {name}', 1)"
        for name in (
            "pg_class",
            "pg_namespace",
            "pg_index",
            "pg_type",
            "pg_roles",
            "pg_publication",
            "pg_publication_tables",
            "pg_publication_rel",
            "pg_settings",
            "pg_replication_slots",
            "pg_stat_replication",
            "pg_proc",
            "pg_opclass",
            "pg_amop",
            "pg_am",
            "pg_operator",
            "pg_extension",
            "pg_depend",
            "pg_locks",
            "pg_inherits",
        )
    ),
]

# Types of an application's user: with casts, constraints and operators of his own.
_TYPES = [
    "CREATE TYPE public.mood AS ENUM ('sad', 'ok', 'glad')",
    "CREATE FUNCTION public.mood_text(public.mood) RETURNS pg_catalog.text LANGUAGE plpgsql "
    "IMMUTABLE AS $$BEGIN RAISE LOG 'hostile call of a cast by %', current_user; RETURN 'x'; END$$",
    "CREATE CAST (public.mood AS pg_catalog.text) WITH FUNCTION public.mood_text(public.mood) "
    "AS IMPLICIT",
    "CREATE FUNCTION public.text_mood(pg_catalog.text) RETURNS public.mood LANGUAGE plpgsql "
    "IMMUTABLE AS $$BEGIN RAISE LOG 'hostile call of a cast by %', current_user; "
    "RETURN NULL; END$$",
    "CREATE CAST (pg_catalog.text AS public.mood) WITH FUNCTION "
    "public.text_mood(pg_catalog.text) AS IMPLICIT",
    "CREATE FUNCTION public.accept(pg_catalog.int4) RETURNS pg_catalog.bool LANGUAGE plpgsql AS "
    "$$BEGIN RAISE LOG 'hostile call of a constraint by %', current_user; RETURN true; END$$",
    "CREATE DOMAIN public.number AS pg_catalog.int4 CHECK (public.accept(VALUE))",
    # The right operators for a domain are those of its type: these are nearer by name.
    "CREATE FUNCTION public.number_op(public.number, public.number) RETURNS pg_catalog.bool "
    "LANGUAGE plpgsql AS $$BEGIN RAISE LOG 'hostile call of an operator by %', current_user; "
    "RETURN true; END$$",
    *(
        f"CREATE OPERATOR public.{name} (FUNCTION = public.number_op, "
        "LEFTARG = public.number, RIGHTARG = public.number)"
        for name in ("<", "<=", "=", ">=", ">")
    ),
]


def occupy(database: FreshDatabase, *tables: str) -> str:
    """Fill ``public`` and make the tables; the URL of a superuser who finds ``public`` first."""
    for statement in (*_TYPES, *tables, *_OWN, _SHADOWS):
        database.execute("SET search_path TO pg_catalog; " + statement)
    role, name = f"victim_{database.name}", database.name
    database.execute(f"CREATE ROLE {role} LOGIN SUPERUSER REPLICATION PASSWORD 'pw'")
    for owner in (f"ROLE {role} IN DATABASE {name}", f"ROLE {role}"):
        database.execute(f"ALTER {owner} SET search_path = public, pg_catalog")
    database.execute(f"ALTER ROLE {role} SET log_statement = 'all'")
    database.execute(f"ALTER ROLE {role} SET log_replication_commands = on")
    return database.url.replace("databus:databus@", f"{role}:pw@")
