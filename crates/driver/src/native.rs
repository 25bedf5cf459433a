//! Native driver.
