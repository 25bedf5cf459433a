-- With which API key a call was made, and from where: an address, or the user at the Unix socket. Both
-- are empty for rows from before, and the first where no key was used.
ALTER TABLE audit ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE audit ADD COLUMN source TEXT NOT NULL DEFAULT '';
