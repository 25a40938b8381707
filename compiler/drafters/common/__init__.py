"""What drafters with a cache of the accepted text share."""
