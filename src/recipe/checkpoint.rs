//! `[checkpoint]`: what is saved, and when.

use super::limits::from;
use super::model::Dtype;
use super::table::table;

table! {
    /// What is saved, and when. The last step, and a stop by a signal, always save.
    pub struct Checkpoint {
        /// Steps between checkpoints, in either stage; 0 means only at the end.
        pub every_steps: u64 = 20,
        /// Checkpoints that stay; older ones are removed.
        pub keep: usize = 2 => from(1.0),
        /// Numbers of the saved weights; the f32 masters are kept with the optimizer either way.
        pub dtype: Dtype = Dtype::Bf16,
    }
}
