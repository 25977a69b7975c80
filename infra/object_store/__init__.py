"""Object stores behind one protocol. Read protocol, memory (the double), directory, s3 with multipart, open, probe."""
