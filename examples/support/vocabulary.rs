use std::fs;
use std::path::Path;

use tokenizers::Tokenizer;

use super::cli::{Failure, failed, failed_to};

/// How text becomes tokens.
#[allow(clippy::large_enum_variant, reason = "there is one")]
pub enum Vocabulary {
    /// A token a byte; byte 0, which text does not contain, ends a document.
    Bytes,
    /// A `tokenizer.json` of the `tokenizers` crate.
    Tokenizer(Tokenizer),
}

impl Vocabulary {
    /// The vocabulary of a `tokenizer.json`, or bytes.
    pub fn open(tokenizer: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = tokenizer else { return Ok(Self::Bytes) };
        let json = fs::read(path).map_err(failed_to("read", path))?;
        let tokenizer =
            Tokenizer::from_bytes(json).map_err(failed(format!("{} is not a tokenizer.json", path.display())))?;
        Ok(Self::Tokenizer(tokenizer))
    }

    /// Number of tokens.
    pub fn size(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Tokenizer(tokenizer) => tokenizer.get_vocab_size(true),
        }
    }

    /// Whether `token` ends a document.
    pub fn is_end(&self, token: u32) -> bool {
        matches!(self, Self::Bytes) && token == 0
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Failure> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Tokenizer(tokenizer) => {
                let encoding = tokenizer.encode_fast(text, false).map_err(failed("cannot encode the text"))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The tokens of a document of a training text, with its end.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>, Failure> {
        let mut tokens = self.encode(text)?;
        if let Self::Bytes = self {
            tokens.push(0);
        }
        Ok(tokens)
    }

    /// The text of some tokens; a character that is cut off at the end becomes U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Failure> {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::Tokenizer(tokenizer) => tokenizer.decode(tokens, true).map_err(failed("cannot decode the tokens")),
        }
    }
}
