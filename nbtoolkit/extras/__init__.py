"""Parts that can be deleted: no other part imports them."""
