"""Why a prefix ended where it did."""
