"""Says the address at which this host's ranks would listen, without a store to ask the way to."""

import json

from unicomm.backends.bootstrap import addresses

print(json.dumps(addresses.route_to("10.77.0.1")))
