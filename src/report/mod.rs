//! Curves and readable trajectories from run folders, as one HTML page.
