-- Services of live sessions that have a URL. The token is sealed like a secret: the URL must be told
-- again, so a hash would not do, and a copy of the database must not open anything.
CREATE TABLE exposures (
    session    TEXT   NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    port       BIGINT NOT NULL,
    host       TEXT   NOT NULL,
    token      BLOB   NOT NULL,
    started_at BIGINT NOT NULL,
    PRIMARY KEY (session, port)
);
