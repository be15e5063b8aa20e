"""Other processes and hosts: connections, credit and deaths, and the calls that wait for them."""
