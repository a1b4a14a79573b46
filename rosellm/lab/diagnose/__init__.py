"""Where the time of a decode step goes on this machine, and what would shorten it: `diagnosis.diagnose`."""
