"""The secret that authorizes changes through an admin port, as both sides use it.

The port names its token file in the refusal of a request. Any local process may have taken the port of a broker that is
stopped, and may name the file of another broker. So the client never sends the token of that file: it signs the
request with it. A signature is worth nothing elsewhere or later, because it covers the port that the client has
connected to and a nonce that the broker draws at each start.
"""

import hashlib
import hmac

#: The name of the token file in a data directory. The command line reads no file of another name.
TOKEN_FILE = "adminToken"
#: The scheme of an Authorization header with a signature.
SCHEME = "Neve"


def signature(token: str, nonce: str, port: int, method: str, target: str) -> str:
    """Return the hexadecimal HMAC-SHA256 of a request; `target` is the path with its query, as it is sent."""
    text = "\n".join((nonce, str(port), method, target))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
