//! `[checkpoint]`: what is saved, and when.

use super::limits::from;
use super::table::table;
use crate::choice::choice;

table! {
    /// What is saved, and when. The last step, and a stop by a signal, always save.
    pub struct Checkpoint {
        /// Steps between checkpoints, in either stage; 0 means only at the end.
        pub every_steps: u64 = 20,
        /// Checkpoints that stay; older ones are removed.
        pub keep: usize = 2 => from(1.0),
        /// Numbers of the saved weights; the f32 masters are kept with the optimizer either way.
        pub dtype: SavedDtype = SavedDtype::Bf16,
    }
}

choice! {
    /// Numbers of saved weights.
    pub enum SavedDtype {
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16, the released form of all but the experts.
        Bf16 = "bf16",
        /// The released form whole: the experts' matrices in MXFP4, rounded to nearest, all else in bfloat16.
        Mxfp4 = "mxfp4",
    }
}
