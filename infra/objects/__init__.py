"""Object stores behind one protocol. Read `store`, `directory`, `s3` with `multipart`, `open`, `probe`."""
