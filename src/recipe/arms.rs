//! `[arms]`: failures that can be switched on to be measured.

use super::table::table;

table! {
    /// Failures that can be switched on to be measured. All off in a healthy run.
    pub struct Arms {
        /// Leave the attention sinks out of the training forward, as a framework without them would.
        pub no_train_sinks: bool = false,
    }
}
