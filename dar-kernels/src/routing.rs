use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use crate::KernelError;

/// Which stream of a candidate gives the key and which gives the value, for output stream `j`
/// (DAR paper, equations 10 and 22).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Routing {
    /// Dual Attention Residuals: key from the opposite stream, value from stream `j`.
    #[default]
    CrossKey,
    /// DAR-SelfKV: key and value from stream `j`. The only routing that exists for one stream.
    SelfKeyValue,
    /// DAR-CrossV: key from stream `j`, value from the opposite stream.
    CrossValue,
    /// DAR-FixedKV: key from stream 0 and value from stream 1, whatever `j` is.
    FixedKeyValue,
}

impl Routing {
    /// All four, in the order of the paper's ablation.
    pub const ALL: [Self; 4] = [Self::CrossKey, Self::SelfKeyValue, Self::CrossValue, Self::FixedKeyValue];

    /// The stream whose normalised state is the key of output stream `stream`.
    pub const fn key_stream(self, stream: usize) -> usize {
        match self {
            Self::CrossKey => 1 - stream,
            Self::SelfKeyValue | Self::CrossValue => stream,
            Self::FixedKeyValue => 0,
        }
    }

    /// The stream whose state is the value of output stream `stream`.
    pub const fn value_stream(self, stream: usize) -> usize {
        match self {
            Self::CrossKey | Self::SelfKeyValue => stream,
            Self::CrossValue => 1 - stream,
            Self::FixedKeyValue => 1,
        }
    }

    /// How many streams this routing needs: two, but for [`Routing::SelfKeyValue`], which takes any number.
    pub const fn fits(self, streams: usize) -> bool {
        matches!(self, Self::SelfKeyValue) || streams == 2
    }

    /// Refuses a routing that does not exist for `streams` streams of the candidates and `outputs` retrieved ones. A
    /// history may hold two streams for one output: the first gives the key, the second the value.
    pub(crate) fn check(self, operation: &'static str, streams: usize, outputs: usize) -> Result<(), KernelError> {
        if !self.fits(streams) {
            let expected = format!("one that exists for {streams} stream(s): SelfKeyValue");
            return Err(KernelError::value(operation, "routing", expected, format!("{self:?}")));
        }
        if outputs == streams || (outputs, self) == (1, Self::FixedKeyValue) {
            return Ok(());
        }
        let one = if streams == 2 { ", or 1 with FixedKeyValue" } else { "" };
        Err(KernelError::value(operation, "outputs of the query", format!("{streams} as in `value`{one}"), outputs))
    }
}

/// [`Routing::key_stream`] of a stream that only the unit knows.
#[cube]
pub(crate) fn key_stream_of(stream: usize, #[comptime] routing: Routing) -> usize {
    match comptime!(routing) {
        Routing::CrossKey => 1 - stream,
        Routing::SelfKeyValue | Routing::CrossValue => stream,
        Routing::FixedKeyValue => 0usize.runtime(),
    }
}
