"""The probe: what hosts, devices and links of a cluster do, measured within a minute."""
